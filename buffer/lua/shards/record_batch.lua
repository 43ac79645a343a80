-- At the home shard: records a batch taken from several shards, and releases the lock.
-- ARGV: step, version, groups, shares, lease token, ids, costs, mask below, token of the lock.
-- Reply: 1 if this is the step's batch now, 0 if the lock was lost.
-- @include lib/batch_record
local batch = read_batch(ARGV[1])
if batch then return batch[1] == ARGV[5] and 1 or 0 end
if redis.call('GET', key('forming')) ~= ARGV[9] then return 0 end
redis.call('DEL', key('forming'))
write_batch(ARGV[1], ARGV[5], ARGV[2], ARGV[3], ARGV[4], ARGV[6], ARGV[7], ARGV[8])
wake('forming') -- the other ranks wait for it
wake('batch')
return 1
