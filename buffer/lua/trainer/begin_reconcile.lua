-- Makes the lineage of a trainer that restored a checkpoint the owner; versions after the checkpoint's
-- are gone. reconcile_groups then sorts the groups in bounded calls.
-- Request: lineage, step, version, resume_version, durable_step (up to which a checkpoint on disk has all).
-- Reply: Outcome: 'begun' (also on a repeated call) | 'not_owner' (a later one took over)
--      | 'behind', newest version (resume version must be above it)

-- Rollbacks older than the last MAX_ROLLBACKS become one that ends all versions before it.
local function write_rollbacks(rollbacks, num_rollbacks)
  if #rollbacks > MAX_ROLLBACKS then
    table.remove(rollbacks, 1)
    rollbacks[1].last = -1
  end
  local texts = {}
  for i, one in ipairs(rollbacks) do texts[i] = whole(one.last) .. ':' .. whole(one.resume) end
  redis.call('HSET', SETTINGS, 'rollbacks', table.concat(texts, ' '), 'num_rollbacks', num_rollbacks)
end

local lineages, progress = key('lineages'), key('reconcile')
local resume = request.resume_version
if request.lineage == lineage then return {'begun'} end
if redis.call('ZSCORE', lineages, request.lineage) then return {'not_owner'} end

local rollbacks, num_rollbacks = read_rollbacks()
-- The checkpoint's version in current numbers. If it was lost in a rollback, all groups belong to
-- another branch than the checkpoint.
local last = renumber(request.version, rollbacks, 1) or -1
if resume < trainer_version or (resume == trainer_version and last ~= trainer_version) then
  return {'behind', trainer_version}
end
redis.call('ZADD', lineages, redis.call('ZCARD', lineages), request.lineage)
local is_moved = is_reconciling -- another lineage's reconcile was interrupted
if resume > last then
  is_moved = true
  rollbacks[#rollbacks + 1] = {last = last, resume = resume}
  write_rollbacks(rollbacks, num_rollbacks + 1)
  -- Running groups keep their distance, or a lease would wait for them as if they were too old: at
  -- once, or as soon as on_stale, which is live, becomes `wait`. Those that began at a version that
  -- is gone will be dropped: no lease waits for them.
  local running = redis.call('ZRANGE', RUNNING, 0, MAX_BATCH, 'WITHSCORES')
  for i = 1, #running, 2 do
    local moved = renumber(finite(running[i + 1], 0), rollbacks, #rollbacks) or resume
    redis.call('ZADD', RUNNING, whole(moved), running[i])
  end
end
redis.call('HSET', SETTINGS, 'lineage', request.lineage, 'reconciling', '1', 'trainer_version', resume,
  'acked_step', request.step)
redis.call('DEL', progress, key('forming'))
redis.call('HSET', progress, 'step', request.step, 'durable', request.durable_step, 'below',
  is_moved and '+inf' or '-inf', 'acked', 0, 'requeued', 0, 'dropped', 0, 'quarantined', 0)
wake('forming')
wake('version')
wake('room')
return {'begun'}
