-- Records the versions that engines serve. Catching up with the trainer may make room.
-- ARGV: engine, version, engine...
-- Reply: 1
redis.call('HSET', key('engine_versions'), unpack(ARGV))
redis.call('HDEL', SETTINGS, 'engines_gone')
wake('room')
wake('engines')
return 1
