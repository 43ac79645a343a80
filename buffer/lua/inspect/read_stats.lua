-- A consistent snapshot of the buffer's counts.
-- Request: nothing.
-- Reply: StatsReply: running, ready, leased, consumed, quarantined, waiting retries, {settings}, {stats},
--        {engine versions}, {{gate version, number of ready groups}, ...} (the first 1000), ms since the
--        push of the stalest ready group or -1, number of prompts in quarantine
local by_version, from = {}, '0'
local first = redis.call('ZRANGE', READY, 0, 0)
-- Not fields_of (lib/group), which may delete keys: a read-only user calls this script.
local stalest = first[1] and redis.pcall('HMGET', key('group:' .. first[1]), 'pushed_at')
local pushed_at = stalest and finite(stalest[1])
local age_ms = pushed_at and math.max(0, now_ms() - pushed_at) or -1
for _ = 1, MAX_ITEMS do
  -- Jumps from one version to the next that has groups: one round per version. Scores above those
  -- of any version are left out.
  local found = redis.call('ZRANGE', READY, from, whole(LARGEST), 'BYSCORE', 'LIMIT', '0', '1', 'WITHSCORES')
  if not found[2] then break end
  local version = math.floor(found[2] / SEQ_RANGE)
  local after = whole((version + 1) * SEQ_RANGE)
  by_version[#by_version + 1] = {version, redis.call('ZCOUNT', READY, whole(version * SEQ_RANGE), '(' .. after)}
  from = after
end
return {
  redis.call('ZCARD', key('running')), redis.call('ZCARD', READY),
  redis.call('ZCARD', key('leased')), redis.call('ZCARD', key('consumed')),
  redis.call('ZCARD', key('quarantined')), redis.call('LLEN', key('retries')),
  redis.call('HGETALL', SETTINGS), redis.call('HGETALL', STATS),
  redis.call('HGETALL', key('engine_versions')), by_version, age_ms, redis.call('HLEN', key('quarantined_prompts')),
}
