-- At the home shard: returns the record of a step's batch, or locks the step to form it from all shards.
-- Request: lease, token, lock_ms (how long the lock lasts), void_token (of a record of which nothing is
--          held any more, or none).
-- Reply: Record: 'batch', lease token, version, groups, shares, {ids}, {costs}, mask below, 1 if done
--      | Locked: 'locked' | Paused: 'paused' | Refused: 'refused', 'done' or 'not_owner'
--      | BatchNotReady: 'wait', {wakes}, 0, ms until the lock expires (-1: a takeover is under way)
local step, token, lock = request.lease.step, request.token, key('forming')
if request.lease.lineage ~= '' and request.lease.lineage ~= lineage then return {'refused', 'not_owner'} end
if is_reconciling then return {'wait', {last_wake('batch')}} end

local batch = read_batch(step)
if batch and not batch.is_done and request.void_token == batch.lease_token then
  forget_batch(step)
  batch = nil
end
if batch then
  return {'batch', batch.lease_token, batch.version, batch.num_groups, batch.num_shares, batch.ids,
    batch.costs, batch.mask_below_version or false, batch.is_done and 1 or 0}
end
if step <= setting('acked_step') then return {'refused', 'done'} end
if is_paused then return {'paused'} end
if not redis.call('SET', lock, token, 'NX', 'PX', request.lock_ms) and redis.call('GET', lock) ~= token then
  -- Waiting for the lock has its own wake stream, or ranks that find no batch would wake each other for ever.
  if redis.call('PTTL', lock) < 0 then redis.call('PEXPIRE', lock, request.lock_ms) end -- ours always expire
  return {'wait', {last_wake('forming')}, 0, redis.call('PTTL', lock)}
end
redis.call('PEXPIRE', lock, request.lock_ms)
return {'locked'}
