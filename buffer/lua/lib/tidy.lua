-- Bounded tidying: leases that were not renewed, and ready groups that became too old.
-- @include lib/drop
-- @include lib/group
-- @include lib/leash
-- @include lib/ready
-- @include lib/return

-- Returns at most `limit` groups to ready whose lease was not renewed in time.
local function expire_leases(limit)
  local now = whole(now_ms())
  local expired = redis.call('ZRANGE', LEASED, '-inf', now, 'BYSCORE', 'LIMIT', '0', limit)
  for _, id in ipairs(expired) do return_leased(id, 'expired') end
  count('expired', #expired)
  return #expired
end

-- Drops at most `limit` ready groups that training version `version` may not use any more.
local function drop_stale_ready(version, limit)
  if is_reconciling then return 0 end
  local cutoff = '(' .. whole(oldest_fresh(version) * SEQ_RANGE)
  local stale = redis.call('ZRANGE', READY, '-inf', cutoff, 'BYSCORE', 'LIMIT', '0', limit)
  if #stale > 0 then leave_ready(stale) end
  drop(stale, 'stale')
  return #stale
end
