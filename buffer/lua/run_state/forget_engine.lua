-- Removes an engine. Admission follows the slowest of the others, which may make room; without any
-- engine nothing is admitted until one serves again.
-- Request: engine.   Reply: 1 if it served a version, 0 if not.
local was_known = redis.call('HDEL', key('engine_versions'), request.engine)
redis.call('HDEL', key('draining'), request.engine)
if redis.call('ZREM', key('commit_gate'), request.engine) == 1 then wake('gate') end
if was_known == 1 then
  if redis.call('EXISTS', key('engine_versions')) == 0 then
    redis.call('HSET', SETTINGS, 'engines_gone', '1')
  end
  wake('room')
  wake('engines')
end
return was_known
