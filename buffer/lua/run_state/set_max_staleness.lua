-- Changes max_staleness of a running job. A lower bound applies from the next sweep or lease.
-- ARGV: value.   Reply: 1
local before = finite(redis.call('HGET', SETTINGS, 'max_staleness'), 0)
local largest = finite(redis.call('HGET', STATS, 'max_staleness_largest'), 0)
redis.call('HSET', STATS, 'max_staleness_largest', whole(math.max(before, largest, tonumber(ARGV[1]))))
redis.call('HSET', SETTINGS, 'max_staleness', ARGV[1])
wake('room')
wake('batch') -- a lease may be waiting for a group that would have become too old
return 1
