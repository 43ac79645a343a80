-- The trainer made a version available. Versions only grow.
-- ARGV: version.   Reply: {'published'} | {'same'} | {'older', current version}
local version, current = tonumber(ARGV[1]), setting('trainer_version')
if version < current then return {'older', current} end
if version == current then return {'same'} end
redis.call('HSET', SETTINGS, 'trainer_version', ARGV[1])
wake('room')
wake('version')
return {'published'}
