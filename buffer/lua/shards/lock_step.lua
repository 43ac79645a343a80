-- At the home shard: returns the record of a step's batch, or locks the step to form it from all shards.
-- ARGV: step, token, ms that the lock lasts, lineage ('' for any), lease token of a void record ('' for none).
-- Reply: {'batch', lease token, version, groups, shares, {ids}, {costs}, mask below, 1 if done}
--      | {'locked'} | {'busy', last id of wake:forming, ms until the lock expires} | {'done'}
--      | {'wait', last id of wake:batch, -1} (a takeover is under way) | {'not_owner'}
-- @include lib/batch_record
local step, token, lock = ARGV[1], ARGV[2], key('forming')
if ARGV[4] ~= '' and ARGV[4] ~= lineage then return {'not_owner'} end
if is_reconciling then return {'wait', last_wake('batch'), -1} end

local batch, ids, costs = read_batch(step)
if batch and not batch[8] and ARGV[5] == batch[1] then
  forget_batch(step)
  batch = nil
end
if batch then
  return {'batch', batch[1], batch[2], batch[3], batch[4], ids, costs, batch[7], batch[8] and 1 or 0}
end
if tonumber(step) <= setting('acked_step') then return {'done'} end
if not redis.call('SET', lock, token, 'NX', 'PX', ARGV[3]) and redis.call('GET', lock) ~= token then
  if redis.call('PTTL', lock) < 0 then redis.call('PEXPIRE', lock, ARGV[3]) end -- ours always expire
  return {'busy', last_wake('forming'), redis.call('PTTL', lock)}
end
redis.call('PEXPIRE', lock, ARGV[3])
return {'locked'}
