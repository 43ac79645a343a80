-- Returns the global batch of a step: the first rank forms it, the others get the same one.
-- Request: lease (a LeaseRequest), lease_ms, lease_token, bound (of work).
-- Reply: Formed: 'leased', lease token, {ids}, {costs}, {ids still leased}, mask below,
--                {{id, {version...}}, ...}
--      | BatchNotReady: 'wait', {wakes}, ready, ms until the next lease expires or -1, running group,
--                its version
--      | Paused: 'paused' (and the step has no batch yet)
--      | Again: 'again' (the bound of clean-up was reached)
--      | Refused: 'refused', 'done' (the step is trained) or 'not_owner' or 'conflict' (the step was
--                leased with other arguments), version, groups, shares
local lease, step, version = request.lease, request.lease.step, request.lease.version
local bound = bound_of(request.bound)

if lease.num_groups > MAX_BATCH then return redis.error_reply('ERR a batch has 65536 groups at most') end
if lease.lineage ~= '' and lease.lineage ~= lineage then return {'refused', 'not_owner'} end

local function wait(number, blocking, blocking_version)
  redis.call('HSET', SETTINGS, 'wanted', number)
  return {'wait', {last_wake('batch')}, redis.call('ZCARD', READY), until_expiry(), blocking, blocking_version}
end

if is_reconciling then return wait(lease.enough, '', 0) end -- its end wakes the waiters
if expire_leases(bound) == bound then return {'again'} end

-- The batch as it was formed. Each rank splits all of it with a pure function, so that all ranks split
-- it identically even if some groups were dropped before the last rank called.
local batch = read_batch(step)
if batch then
  local held, num_consumed, renumbered = held_by(batch.lease_token, batch.ids)
  if num_consumed > 0 or batch.is_done then return {'refused', 'done'} end
  if #held > 0 then
    if batch.version ~= version or batch.num_groups ~= lease.num_groups
        or batch.num_shares ~= lease.num_shares then
      return {'refused', 'conflict', batch.version, batch.num_groups, batch.num_shares}
    end
    return {'leased', batch.lease_token, batch.ids, batch.costs, held, batch.mask_below_version or false,
      renumbered}
  end
  forget_batch(step) -- all its groups were dropped or returned: form a new one
end
if step <= setting('acked_step') then return {'refused', 'done'} end
if is_paused then return {'paused'} end

if drop_stale_ready(version, bound) == bound then return {'again'} end
local blocking, blocking_version = blocking_group(version)
if blocking ~= '' then return wait(1, blocking, blocking_version) end
if redis.call('ZCARD', READY) < lease.enough then return wait(lease.enough, '', 0) end
if wanted ~= 0 then redis.call('HSET', SETTINGS, 'wanted', 0) end

local candidates = {}
for i, candidate in ipairs((choose(version, lease.num_groups))) do candidates[i] = candidate[2] end
local ids, fields = whole_groups(candidates)
if #ids < #candidates or #ids < lease.enough then return {'again'} end -- damaged groups have been removed
local deadline, mask_below_version = whole(now_ms() + request.lease_ms), mask_below(version)
local costs, renumbered = take(ids, fields, request.lease_token, deadline, lease)
write_batch(lease, request.lease_token, ids, costs, mask_below_version)
if #ids < lease.num_groups then wake('batch') end -- the other ranks may still wait for a full one
return {'leased', request.lease_token, ids, costs, ids, mask_below_version, renumbered}
