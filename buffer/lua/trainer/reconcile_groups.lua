-- Sorts all groups after begin_reconcile: one bounded part per call, until nothing is left.
-- Request: lineage, bound (of work).
-- Reply: 1 if there is more, Reconciled: {acked, requeued, dropped, quarantined} (totals so far)
--      | nil: another lineage took over
local progress, bound = key('reconcile'), bound_of(request.bound)
if request.lineage ~= lineage then return nil end

local function reply(is_more)
  local totals = redis.call('HMGET', progress, 'acked', 'requeued', 'dropped', 'quarantined')
  for i = 1, 4 do totals[i] = finite(totals[i], 0) end
  return {is_more, totals}
end
local function add_progress(name, amount)
  if amount > 0 then
    local before = finite(redis.call('HGET', progress, name), 0)
    redis.call('HSET', progress, name, whole(before + amount))
  end
end
if not is_reconciling then return reply(0) end
local step = finite(redis.call('HGET', progress, 'step')) or damaged('reconcile.step')
local durable = finite(redis.call('HGET', progress, 'durable')) or damaged('reconcile.durable')

-- 1. Consumed groups are in the checkpoint on disk, or were trained up to the restored step and stay
-- consumed until one contains them, or will be trained again.
local function consumed(first, last)
  return redis.call('ZRANGE', key('consumed'), first, last, 'BYSCORE', 'LIMIT', '0', bound, 'WITHSCORES')
end
local contained, undone = consumed('-inf', whole(durable)), consumed('(' .. whole(step), '+inf')
for i = 1, #contained, 2 do
  local id = contained[i]
  redis.call('ZREM', key('consumed'), id)
  count('bytes_consumed', -(to_tombstones({id}, 'acked')))
  count('acked', 1)
  add_progress('acked', 1)
  audit({id}, 'acked', 's', contained[i + 1])
end
for i = 1, #undone, 2 do
  local id = undone[i]
  redis.call('ZREM', key('consumed'), id)
  count('bytes_consumed', -finite(fields_of(id, 'bytes')[1], 0))
  add_progress(to_ready(id, 'reconciled') and 'requeued' or 'quarantined', 1)
end
if #contained + #undone > 0 then return reply(1) end

-- 2. Leased groups belong to the old lineage.
local leased = redis.call('ZRANGE', LEASED, '0', bound - 1)
for _, id in ipairs(leased) do
  add_progress(return_leased(id, 'reconciled') and 'requeued' or 'quarantined', 1)
end
if #leased > 0 then return reply(1) end

-- 3. Batches after the checkpoint will be formed anew; those before it are never requested.
local batches = redis.call('ZRANGE', BATCHES, '0', bound - 1)
for _, batch in ipairs(batches) do forget_batch(batch) end
if #batches > 0 then return reply(1) end

-- 4. Ready groups are renumbered, from the newest down. Numbers only grow, so no group is met twice;
-- groups pushed meanwhile have new numbers already.
local rollbacks, num_rollbacks = read_rollbacks()
local below = redis.call('HGET', progress, 'below')
local ready = redis.call('ZRANGE', READY, below, '-inf', 'BYSCORE', 'REV', 'LIMIT', '0', bound, 'WITHSCORES')
for i = 1, #ready, 2 do
  local id = ready[i]
  local change, min_version, max_version = update_numbers(id, rollbacks, num_rollbacks)
  if change == 'gone' then
    leave_ready({id})
    drop({id}, 'lineage')
    add_progress('dropped', 1)
  elseif change == 'damaged' then
    leave_ready({id})
    set_aside(id)
    add_progress('quarantined', 1)
  elseif change == 'moved' then
    local seq = finite(ready[i + 1], 0) % SEQ_RANGE
    redis.call('ZADD', READY, whole(gate_of(min_version, max_version) * SEQ_RANGE + seq), id)
  end
  below = '(' .. ready[i + 1]
end
if #ready > 0 then
  redis.call('HSET', progress, 'below', below)
  return reply(1)
end

redis.call('HDEL', SETTINGS, 'reconciling')
wake('room')
wake('batch')
return reply(0)
