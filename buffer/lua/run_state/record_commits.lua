-- Records the versions that engines serve. Catching up with the trainer may make room.
-- ARGV: how the first engine took its version, as JSON ('' for no record), engine, version, engine...
-- Reply: 1
-- Atomic with the record, because waiters for the version may read that.
redis.call('HSET', key('engine_versions'), unpack(ARGV, 2))
if ARGV[1] ~= '' then redis.call('HSET', key('commits'), ARGV[2], ARGV[1]) end
redis.call('HDEL', SETTINGS, 'engines_gone')
wake('room')
wake('engines')
return 1
