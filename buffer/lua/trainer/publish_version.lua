-- Sets the trainer's version, which only grows.
-- ARGV: version, lineage ('' for any).
-- Reply: {'published'} | {'same'} | {'older', current version} | {'not_owner'}
-- @include lib/leash
if ARGV[2] ~= '' and ARGV[2] ~= lineage then return {'not_owner'} end
local version = tonumber(ARGV[1])
if version < trainer_version then return {'older', trainer_version} end
if version == trainer_version then return {'same'} end
redis.call('HSET', SETTINGS, 'trainer_version', ARGV[1])
wake('room')
wake('version')
return {'published'}
