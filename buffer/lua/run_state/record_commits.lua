-- Records the versions that engines serve; those that drained get requests again. Catching up with the
-- trainer may make room.
-- Request: versions (by engine).   Reply: 1
for engine, version in pairs(request.versions) do
  redis.call('HSET', key('engine_versions'), engine, version)
  redis.call('HDEL', key('draining'), engine)
end
redis.call('HDEL', SETTINGS, 'engines_gone')
wake('room')
wake('engines')
return 1
