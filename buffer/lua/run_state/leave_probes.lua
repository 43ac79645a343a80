-- Leaves what the trainer computed of some texts at a version, in place of an earlier version's.
-- Request: version, probes.   Reply: 1
redis.call('DEL', key('probes'))
redis.call('HSET', key('probes'), request.version, request.probes)
return 1
