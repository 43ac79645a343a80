-- Changes max_staleness while the run goes on. Lower bites at the next sweep or lease, higher at once.
-- ARGV: value.   Reply: 1
redis.call('HSET', SETTINGS, 'max_staleness', ARGV[1])
wake('room')
wake('batch') -- a lease may wait for a group that would have become too old
return 1
