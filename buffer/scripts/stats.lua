-- One consistent picture of the buffer, for people and for the law of conservation.
-- Reply: {running, ready, leased, consumed, waiting retries, {settings}, {stats}, {engine versions},
--         {min_version, number of ready groups, ...}}
local by_version, first = {}, redis.call('ZRANGE', READY, 0, 0, 'WITHSCORES')
while first[2] do
  -- From one version straight to the next that has groups: as many rounds as there are versions.
  local version = math.floor(first[2] / SEQ_RANGE)
  local after = whole((version + 1) * SEQ_RANGE)
  by_version[#by_version + 1] = version
  by_version[#by_version + 1] = redis.call('ZCOUNT', READY, whole(version * SEQ_RANGE), '(' .. after)
  first = redis.call('ZRANGE', READY, after, '+inf', 'BYSCORE', 'LIMIT', '0', '1', 'WITHSCORES')
end
return {
  redis.call('ZCARD', RUNNING), redis.call('ZCARD', READY), redis.call('ZCARD', LEASED),
  redis.call('ZCARD', CONSUMED), redis.call('LLEN', RETRIES),
  redis.call('HGETALL', SETTINGS), redis.call('HGETALL', STATS), redis.call('HGETALL', ENGINES),
  by_version,
}
