-- Keeps new requests from an engine that serves, until its next version is recorded or it is removed.
-- Request: engine.   Reply: 1 if it serves a version, 0 if not.
if not redis.call('HGET', key('engine_versions'), request.engine) then return 0 end
redis.call('HSET', key('draining'), request.engine, '1')
wake('engines')
return 1
