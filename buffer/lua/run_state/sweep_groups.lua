-- Ends expired credits, moves groups with expired leases to ready, then drops stale ready groups.
-- Request: bound (of work), credit_ms.
-- Reply: expired, dropped, credits; one at the bound means there may be more.
local bound, lost_before = bound_of(request.bound), lost_with_server(request.credit_ms)
local lost = redis.call('ZRANGE', CREDITS, '-inf', whole(now_ms()), 'BYSCORE', 'LIMIT', '0', bound)
if #lost > 0 then
  lose_running(lost, 'expired', lost_before)
  call_many('ZREM', CREDITS, lost)
end
local num_expired = expire_leases(bound)
return {num_expired, drop_stale_ready(trainer_version, bound), #lost}
