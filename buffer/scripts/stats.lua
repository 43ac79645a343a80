-- One consistent picture of the buffer, for people and for the law of conservation.
-- Reply: {running, ready, leased, consumed, quarantined, waiting retries, {settings}, {stats},
--         {engine versions}, {gate version, number of ready groups, ...}, ms since the push of the
--         stalest ready group or -1, number of prompts in quarantine}
local by_version, first = {}, redis.call('ZRANGE', READY, 0, 0, 'WITHSCORES')
local pushed_at = first[1] and redis.call('HGET', group_key(first[1]), 'pushed_at')
local age_ms = pushed_at and math.max(0, now_ms() - pushed_at) or -1
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
  redis.call('ZCARD', CONSUMED), redis.call('ZCARD', QUARANTINED), redis.call('LLEN', RETRIES),
  redis.call('HGETALL', SETTINGS), redis.call('HGETALL', STATS), redis.call('HGETALL', ENGINES),
  by_version, age_ms, redis.call('HLEN', POISONOUS),
}
