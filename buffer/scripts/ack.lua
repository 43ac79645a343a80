-- A checkpoint is durable: consumed -> acked, for steps up to the one given; payloads go.
-- ARGV: step, bound of work.   Reply: how many were acknowledged (fewer than the bound: that is all).
local due = redis.call('ZRANGE', CONSUMED, '-inf', ARGV[1], 'BYSCORE', 'LIMIT', '0', ARGV[2], 'WITHSCORES')
local newest
for i = 1, #due, 2 do
  local id, step = due[i], due[i + 1]
  redis.call('ZREM', CONSUMED, id)
  bury(id, 'acked')
  if step ~= newest then redis.call('EXPIRE', lease_key(step), TOMBSTONE_S) end
  newest = step
end
if #due > 0 then
  count('acked', #due / 2)
  if tonumber(newest) > setting('acked_step') then redis.call('HSET', SETTINGS, 'acked_step', newest) end
end
return #due / 2
