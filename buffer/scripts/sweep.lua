-- Tidies up: expired credits end, expired leases go back to ready, then stale ready groups are dropped.
-- ARGV: bound of work.   Reply: {expired, dropped, credits}; one at the bound means there may be more.
local bound = tonumber(ARGV[1])
local lost = redis.call('ZRANGE', CREDITS, '-inf', whole(now_ms()), 'BYSCORE', 'LIMIT', '0', bound)
for _, id in ipairs(lost) do
  leave_running(id)
  audit(id, 'abandoned', 'r', 'expired')
end
if #lost > 0 then
  count('abandoned:expired', #lost)
  wake('room')
end
local num_expired = expire_leases(bound)
return {num_expired, drop_stale_ready(trainer_version, bound), #lost}
