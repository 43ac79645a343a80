-- Makes the lineage of a trainer that restored a checkpoint the owner; versions after the checkpoint's
-- are gone. reconcile_groups then sorts the groups in bounded calls.
-- ARGV: lineage, step, version, resume version, the step up to which a checkpoint on disk has all.
-- Reply: {'begun'} (also on a repeated call) | {'not_owner'} (a later one took over)
--      | {'behind', newest version} (resume version must be above it)
-- @include lib/leash
-- @include lib/lineage
-- @include lib/running

-- Gaps older than the last MAX_GAPS become one gap that ends all versions before it.
local function write_gaps(gaps, num_gaps)
  if #gaps > MAX_GAPS then
    table.remove(gaps, 1)
    gaps[1].last = -1
  end
  local pairs_ = {}
  for i, gap in ipairs(gaps) do pairs_[i] = whole(gap.last) .. ':' .. whole(gap.resume) end
  redis.call('HSET', SETTINGS, 'gaps', table.concat(pairs_, ' '), 'num_gaps', num_gaps)
end

local lineages, progress = key('lineages'), key('reconcile')
local version, resume = tonumber(ARGV[3]), tonumber(ARGV[4])
if ARGV[1] == lineage then return {'begun'} end
if redis.call('ZSCORE', lineages, ARGV[1]) then return {'not_owner'} end

local gaps, num_gaps = read_gaps()
-- The checkpoint's version in current numbers. If it was lost in a rollback, all groups belong to
-- another branch than the checkpoint.
local last = renumber(version, gaps, 1) or -1
if resume < trainer_version or (resume == trainer_version and last ~= trainer_version) then
  return {'behind', trainer_version}
end
redis.call('ZADD', lineages, redis.call('ZCARD', lineages), ARGV[1])
local is_moved = is_reconciling -- another lineage's reconcile was interrupted
if resume > last then
  is_moved = true
  gaps[#gaps + 1] = {last = last, resume = resume}
  write_gaps(gaps, num_gaps + 1)
  if on_stale == 'wait' then
    -- Running groups keep their distance, or a lease would wait for them as if they were too old.
    -- Those that began at a version that is gone will be dropped: no lease waits for them.
    local running = redis.call('ZRANGE', RUNNING, 0, MAX_BATCH, 'WITHSCORES')
    for i = 1, #running, 2 do
      local moved = renumber(finite(running[i + 1], 0), gaps, #gaps) or resume
      redis.call('ZADD', RUNNING, whole(moved), running[i])
    end
  end
end
redis.call('HSET', SETTINGS, 'lineage', ARGV[1], 'reconciling', '1', 'trainer_version', ARGV[4],
  'acked_step', ARGV[2])
redis.call('DEL', progress, key('forming'))
redis.call('HSET', progress, 'step', ARGV[2], 'durable', ARGV[5], 'below',
  is_moved and '+inf' or '-inf', 'acked', 0, 'requeued', 0, 'dropped', 0, 'quarantined', 0)
wake('forming')
wake('version')
wake('room')
return {'begun'}
