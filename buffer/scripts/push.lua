-- Commits a group whose payload the client has just SET with an expiry.
-- ARGV: group id, min_version, tokens, trainable tokens, bytes, task, index, attempt.
-- Reply: {'stored'} | {'duplicate'} | {'stale'} | {'missing'} (the payload is gone: send it again).
local id, min_version, tokens, bytes = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[5]

local state = redis.call('HGET', group_key(id), 'state')
if state then
  -- The retry's SET NX did nothing for a living group; for a buried one it made a new orphan.
  if state == 'acked' or string.sub(state, 1, 8) == 'dropped:' then
    redis.call('UNLINK', payload_key(id))
  end
  return {'duplicate'}
end
if redis.call('PERSIST', payload_key(id)) == 0 then return {'missing'} end

local score = min_version * SEQ_RANGE + redis.call('HINCRBY', SETTINGS, 'sequence', 1) % SEQ_RANGE
redis.call('HSET', group_key(id), 'state', 'ready', 'owner', '', 'score', whole(score),
  'min_version', min_version, 'tokens', tokens, 'trainable', ARGV[4], 'bytes', bytes,
  'task', ARGV[6], 'index', ARGV[7], 'attempt', ARGV[8])
redis.call('ZREM', RUNNING, id)
count('pushed', 1)
count('tokens_pushed', tokens)
count('bytes', bytes)
count('tokens', tokens)

if min_version < oldest_fresh(setting('trainer_version')) then
  drop_stale(id)
  wake('room')
  return {'stale'}
end
enter_ready(id, score)
wake_batch()
return {'stored'}
