-- Records that an engine serves a version, and how it took it; atomically, because waiters for the
-- version may read the record.
-- ARGV: engine, version, record as JSON.   Reply: 1
redis.call('HSET', key('engine_versions'), ARGV[1], ARGV[2])
redis.call('HSET', key('commits'), ARGV[1], ARGV[3])
redis.call('HDEL', SETTINGS, 'engines_gone')
wake('room')
wake('engines')
return 1
