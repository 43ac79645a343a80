-- At the home shard: records a batch taken from several shards, and releases the lock.
-- Request: lease, lease_token (also of the lock), ids, costs, mask_below_version (or none).
-- Reply: 1 if this is the step's batch now, 0 if the lock was lost.
local batch = read_batch(request.lease.step)
if batch then return batch.lease_token == request.lease_token and 1 or 0 end
if redis.call('GET', key('forming')) ~= request.lease_token then return 0 end
redis.call('DEL', key('forming'))
write_batch(request.lease, request.lease_token, request.ids, request.costs, request.mask_below_version)
wake('forming') -- the other ranks wait for it
wake('batch')
return 1
