-- Sets the trainer's version, which only grows.
-- Request: version, lineage ('' for any).
-- Reply: Outcome: 'announced' | 'same' | 'older', current version | 'not_owner'
if request.lineage ~= '' and request.lineage ~= lineage then return {'not_owner'} end
local version = request.version
if version < trainer_version then return {'older', trainer_version} end
if version == trainer_version then return {'same'} end
redis.call('HSET', SETTINGS, 'trainer_version', version)
wake('room')
wake('version')
return {'announced'}
