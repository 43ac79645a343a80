-- Gives new groups credits to be generated, in their order and as far as there is room, each with its prompt.
-- Request: groups (a list of group_id, prompt ('attempt index task', or none) and position), worker, is_worker (whether
--          the caller is it), caller and call (who calls, and the number of its call), credit_ms (how long a credit
--          lasts unless it is renewed).
-- Reply: Credits: the prompts of those that got one ('' for none), trainer version; if none got one, last wake, in use,
--        limit, 1 if the run is paused
-- A prompt that waits to run again comes first, and alone: it may have to run alone.
local groups, worker, caller, given = request.groups, request.worker, request.caller, {}
local calls, expiry = key('calls'), whole(now_ms() + request.credit_ms)

-- A repeated call whose reply was lost gets that reply again. A copy that comes after a later call, or after another
-- caller became the worker, gives nothing: its groups would run twice. An unknown caller is the worker, too: Redis has
-- lost its `reclaim_worker` with the last second before a crash.
local known = redis.call('HMGET', calls, worker, caller)
local is_read, last = pcall(cmsgpack.unpack, known[2] or '')
if not is_read or type(last) ~= 'table' or not finite(last[1]) then last = {0} end
local is_replaced = request.is_worker and known[2] and known[1] and known[1] ~= caller
if request.call < last[1] or is_replaced then return {{}, trainer_version, last_wake('room')} end
if request.call == last[1] then return last[2] end

local function admit()
  if #groups == 0 then return {{}, trainer_version} end
  if is_paused then return {{}, trainer_version, last_wake('room'), 0, 0, 1} end

  -- Engines that are too old get no requests and do not count; if there is no other, the limit is 0.
  local lag, num_fresh, served = 0, 0, redis.call('HVALS', key('engine_versions'))
  for _, version in ipairs(served) do
    local behind = trainer_version - finite(version, -LARGEST) -- an unreadable version is not fresh
    if behind <= max_staleness then lag, num_fresh = math.max(lag, behind), num_fresh + 1 end
  end
  if served[1] and num_fresh == 0 then lag = max_staleness + 1 end

  -- Counted from the sets: a cumulative counter would drift at the first dropped group.
  local in_use = redis.call('ZCARD', RUNNING) + redis.call('ZCARD', READY) + redis.call('ZCARD', key('leased'))
  -- 1e-6 because products such as 1.15 * 100 are slightly below 115 in floating point.
  local limit = (max_staleness + 1 - lag) * groups_per_version() * setting('oversampling')
  limit = math.max(0, math.floor(limit + 1e-6))
  -- Once the last engine is gone, the age of the next one's weights is unknown. (Before the first engine
  -- the lag is 0: engines get the trainer's version before workers ask for admission.)
  if not served[1] and redis.call('HGET', SETTINGS, 'engines_gone') then limit = 0 end
  local shard, num_shards = setting('shard'), math.max(1, setting('num_shards'))
  local quota = math.floor(limit / num_shards) + (shard < limit % num_shards and 1 or 0)
  if in_use >= quota then return {{}, trainer_version, last_wake('room'), in_use, quota} end

  local again -- the prompt that has waited longest to run again; none after MAX_ITEMS entries that are no prompts
  for _ = 1, MAX_ITEMS do
    again = redis.call('LPOP', RETRIES)
    if not again or read_prompt(again) then break end
    count('retries_damaged', 1)
    again = nil
  end
  for i = 1, again and 1 or math.min(#groups, quota - in_use) do
    local id, prompt = groups[i].group_id, again or groups[i].prompt
    -- The score is the oldest version that its tokens can have.
    redis.call('ZADD', RUNNING, trainer_version - lag, id)
    redis.call('ZADD', CREDITS, expiry, id)
    audit({id}, 'admitted', 'v', trainer_version)
    if prompt then note_prompt(id, prompt, worker, again and 0 or groups[i].position) end
    given[i] = prompt or ''
  end
  return {given, trainer_version}
end

local reply = admit()
redis.call('HSET', calls, caller, cmsgpack.pack({request.call, reply}))
if request.is_worker and known[1] ~= caller then redis.call('HSET', calls, worker, caller) end
return reply
