-- A trainer restored a checkpoint: from now on its lineage owns the buffer, and the versions after the
-- checkpoint's are gone. What is in hand is sorted by reconcile_groups, in bounded calls.
-- ARGV: lineage, step, version, resume version.
-- Reply: {'begun'} (also when sent again) | {'not_owner'} (a later one took over)
--      | {'behind', newest version} (resume version must be above it)
-- @include lib/leash
-- @include lib/lineage
-- @include lib/running

-- What is older than the last MAX_GAPS becomes one gap that ends all versions before it.
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
-- The checkpoint's version as it is numbered now. If it was lost in a rollback, all groups are of
-- another branch than the checkpoint.
local last = renumber(version, gaps, 1) or -1
if resume < trainer_version or (resume == trainer_version and last ~= trainer_version) then
  return {'behind', trainer_version}
end
redis.call('ZADD', lineages, redis.call('ZCARD', lineages), ARGV[1])
local is_moved = is_reconciling -- an earlier call of another lineage was cut off in the middle
if resume > last then
  is_moved = true
  gaps[#gaps + 1] = {last = last, resume = resume}
  write_gaps(gaps, num_gaps + 1)
  if on_stale == 'wait' then
    -- What still runs keeps its distance, or a lease would wait for it as if it were too old. What
    -- began at a version that is gone will be dropped: no lease waits for that.
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
redis.call('HSET', progress, 'step', ARGV[2], 'below', is_moved and '+inf' or '-inf',
  'acked', 0, 'requeued', 0, 'dropped', 0, 'quarantined', 0)
wake('forming')
wake('version')
wake('room')
return {'begun'}
