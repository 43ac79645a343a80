-- The groups that this shard could contribute to a batch at a version, after clean-up.
-- ARGV: version, most candidates, bound of work, ready groups at which a push wakes (0: unchanged).
-- Reply: {'ready', {id, key, id, key...}, ready, last wake id, ms until the next lease expires or -1,
--         running group that must be waited for, its version} | {'again'}
-- @include lib/choose
-- @include lib/tidy
local version, bound = tonumber(ARGV[1]), bound_of(ARGV[3])
if not is_reconciling then
  if expire_leases(bound) == bound or drop_stale_ready(version, bound) == bound then return {'again'} end
end
local blocking, blocking_version = blocking_group(version)
local number = blocking ~= '' and '1' or ARGV[4]
if number ~= '0' then redis.call('HSET', SETTINGS, 'wanted', number) end
local chosen, was_damaged = {}, false
if not is_reconciling then chosen, was_damaged = choose(version, ARGV[2]) end
if was_damaged then return {'again'} end
return {'ready', chosen, redis.call('ZCARD', READY), last_wake('batch'), until_expiry(), blocking,
  blocking_version}
