-- Gives a new group a credit to be generated, if there is room.
-- Request: group_id, credit_ms (how long the credit lasts unless it is renewed).
-- Reply: Credit: 1 if it was given, trainer version, 1 if a prompt waits to run again; if not, last wake, in use, limit,
--        1 if the run is paused
local id, expiry = request.group_id, whole(now_ms() + request.credit_ms)

if redis.call('ZSCORE', RUNNING, id) then
  redis.call('ZADD', CREDITS, expiry, id)
  return {1, trainer_version, redis.call('EXISTS', RETRIES)}
end

if is_paused then return {0, trainer_version, 0, last_wake('room'), 0, 0, 1} end

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
if in_use >= quota then return {0, trainer_version, 0, last_wake('room'), in_use, quota} end

-- The score is the oldest version that its tokens can have.
redis.call('ZADD', RUNNING, trainer_version - lag, id)
redis.call('ZADD', CREDITS, expiry, id)
audit({id}, 'admitted', 'v', trainer_version)
return {1, trainer_version, redis.call('EXISTS', RETRIES)}
