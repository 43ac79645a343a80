-- Engines began to serve versions: they catch up with the trainer, which may make room.
-- ARGV: engine, version, engine, version...   Reply: number of engines.
redis.call('HSET', ENGINES, unpack(ARGV))
wake('room')
return #ARGV / 2
