-- Bounded clean-up of expired leases and stale ready groups.

-- Moves at most `limit` groups with an expired lease to ready.
local function expire_leases(limit)
  local now = whole(now_ms())
  local expired = redis.call('ZRANGE', LEASED, '-inf', now, 'BYSCORE', 'LIMIT', '0', limit)
  for _, id in ipairs(expired) do return_leased(id, 'expired') end
  count('expired', #expired)
  return #expired
end

-- Drops at most `limit` ready groups that are too old to be trained at `version`.
local function drop_stale_ready(version, limit)
  if is_reconciling then return 0 end
  local cutoff = '(' .. whole(oldest_fresh(version) * SEQ_RANGE)
  local stale = redis.call('ZRANGE', READY, '-inf', cutoff, 'BYSCORE', 'LIMIT', '0', limit)
  if #stale > 0 then leave_ready(stale) end
  drop(stale, 'stale')
  return #stale
end
