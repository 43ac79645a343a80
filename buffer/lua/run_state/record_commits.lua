-- Records the versions that engines serve; those that drained get requests again. Catching up with the
-- trainer may make room.
-- ARGV: engine, version, engine...
-- Reply: 1
redis.call('HSET', key('engine_versions'), unpack(ARGV))
for i = 1, #ARGV, 2 do redis.call('HDEL', key('draining'), ARGV[i]) end
redis.call('HDEL', SETTINGS, 'engines_gone')
wake('room')
wake('engines')
return 1
