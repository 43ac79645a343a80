-- Keeps new requests from an engine that serves, until its next version is recorded or it is removed.
-- ARGV: engine.   Reply: 1 if it serves a version, 0 if not.
if not redis.call('HGET', key('engine_versions'), ARGV[1]) then return 0 end
redis.call('HSET', key('draining'), ARGV[1], '1')
wake('engines')
return 1
