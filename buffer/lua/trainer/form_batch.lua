-- Returns the global batch of a step: the first rank forms it, the others get the same one.
-- ARGV: step, version, number of groups, number of shares, lease in ms, lease token, lineage ('' for
--       any), bound of work, number of groups that suffice,
--       cost of a pair of tokens (in that of a token).
-- Reply: {'leased', lease token, deadline ms, {ids}, {costs}, {ids still held}, mask below, {id, versions...}}
--      | {'wait', last wake id, ready, ms until the next lease expires or -1, running group, its version}
--      | {'again'} (the bound of clean-up was reached) | {'done'} (the step is trained) | {'not_owner'}
--      | {'conflict', version, groups, shares} (the step was leased with other arguments)
-- @include lib/batch_record
-- @include lib/choose
-- @include lib/held
-- @include lib/take
-- @include lib/tidy
local step, version, num_groups, num_shares = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local lease_ms, lease_token, bound = tonumber(ARGV[5]), ARGV[6], bound_of(ARGV[8])
local enough, pair_cost = tonumber(ARGV[9]), tonumber(ARGV[10])

if num_groups > MAX_BATCH then return redis.error_reply('ERR a batch has 65536 groups at most') end
if ARGV[7] ~= '' and ARGV[7] ~= lineage then return {'not_owner'} end

local function wait(number, blocking, blocking_version)
  redis.call('HSET', SETTINGS, 'wanted', number)
  return {'wait', last_wake('batch'), redis.call('ZCARD', READY), until_expiry(), blocking, blocking_version}
end

if is_reconciling then return wait(enough, '', 0) end -- its end wakes the waiters
if expire_leases(bound) == bound then return {'again'} end

-- The batch as it was formed. Each rank splits all of it with a pure function, so that all ranks split
-- it identically even if some groups were dropped before the last rank called.
local batch, ids, costs = read_batch(step)
if batch then
  local held, num_consumed, moved = held_by(batch[1], ids)
  if num_consumed > 0 or batch[8] then return {'done'} end
  if #held > 0 then
    if batch[2] ~= ARGV[2] or batch[3] ~= ARGV[3] or batch[4] ~= num_shares then
      return {'conflict', batch[2], batch[3], batch[4]}
    end
    return {'leased', batch[1], deadline_of(held[1]), ids, costs, held, batch[7], moved}
  end
  forget_batch(step) -- all its groups were dropped or returned: form a new one
end
if tonumber(step) <= setting('acked_step') then return {'done'} end

if drop_stale_ready(version, bound) == bound then return {'again'} end
local blocking, blocking_version = blocking_group(version)
if blocking ~= '' then return wait(1, blocking, blocking_version) end
if redis.call('ZCARD', READY) < enough then return wait(enough, '', 0) end
if wanted ~= 0 then redis.call('HSET', SETTINGS, 'wanted', 0) end

local chosen, candidates, fields = choose(version, num_groups), {}, nil
for i = 1, #chosen, 2 do candidates[#candidates + 1] = chosen[i] end
ids, fields = whole_groups(candidates)
if #ids < #candidates or #ids < enough then return {'again'} end -- damaged groups have been removed
local deadline, moved = whole(now_ms() + lease_ms), nil
costs, moved = take(ids, fields, lease_token, deadline, step, pair_cost)
write_batch(step, lease_token, ARGV[2], ARGV[3], num_shares, table.concat(ids, ' '),
  table.concat(costs, ' '), mask_below(version))
if #ids < num_groups then wake('batch') end -- the other ranks may still wait for a full one
return {'leased', lease_token, deadline, ids, costs, ids, mask_below(version), moved}
