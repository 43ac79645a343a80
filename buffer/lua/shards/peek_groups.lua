-- The groups that this shard could contribute to a batch at a version, after clean-up.
-- Request: version, limit (of candidates), bound (of work), wanted (ready groups at which a push wakes;
--          0: unchanged).
-- Reply: Peek: {{key, id}, ...}, ready, last wake, ms until the next lease expires or -1,
--        running group that must be waited for, its version | nil: call again
local version, bound = request.version, bound_of(request.bound)
if not is_reconciling then
  if expire_leases(bound) == bound or drop_stale_ready(version, bound) == bound then return nil end
end
local blocking, blocking_version = blocking_group(version)
local number = blocking ~= '' and 1 or request.wanted
if number ~= 0 then redis.call('HSET', SETTINGS, 'wanted', number) end
local chosen, was_damaged = {}, false
if not is_reconciling then chosen, was_damaged = choose(version, request.limit) end
if was_damaged then return nil end
return {chosen, redis.call('ZCARD', READY), last_wake('batch'), until_expiry(), blocking, blocking_version}
