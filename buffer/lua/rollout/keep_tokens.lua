-- Keeps tokens of a running group with its prompt.
-- Request: group_id, oldest (version that sampled a token of the group; none if unknown).
-- Further arguments: for each part its name and its tokens. They are small beside a group's payload, so
-- Lua may copy them.
-- Reply: 1 | 0 if the group is not running (nothing is kept)
--      | -1 if on_stale=wait could not wait for a group with such old tokens (nothing is kept).
local id = request.group_id
local score = redis.call('ZSCORE', RUNNING, id)
local text = score and redis.call('HGET', PROMPTS, id)
local name = text and name_of(text)
if not name then return 0 end

-- Whether the steps to come can train a group as old as `oldest` beside all others that are as old. What
-- is leased takes the place of a whole batch, now or, if it returns, later.
local function can_wait_for(oldest)
  local share = groups_per_version() / math.max(1, setting('num_shards'))
  local num_leased = redis.call('ZCARD', LEASED)
  if num_leased > 0 then num_leased = math.max(num_leased, share) end
  for last = oldest, math.min(finite(score, 0), trainer_version) - 1 do
    local num_ready = redis.call('ZCOUNT', READY, '-inf', '(' .. whole((last + 1) * SEQ_RANGE))
    local num_others = num_leased + num_ready + redis.call('ZCOUNT', RUNNING, '-inf', whole(last))
    if num_others + 1 > (last - oldest_fresh(trainer_version) + 1) * share then return false end
  end
  return true
end

local oldest = request.oldest and renumber(request.oldest, read_rollbacks(), 1)
if oldest and oldest < finite(score, 0) then
  if on_stale == 'wait' and not can_wait_for(oldest) then return -1 end
  redis.call('ZADD', RUNNING, whole(oldest), id)
end
if ARGV[2] then
  redis.call('HSET', KEPT, name, '1')
  redis.call('HSET', kept_key(name), unpack(ARGV, 2))
end
return 1
