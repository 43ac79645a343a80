-- How groups come back to ready.
-- @include lib/audit
-- @include lib/group
-- @include lib/quarantined
-- @include lib/ready

-- A group that is in no set at this moment goes back to ready; `event` says why. Returns whether it
-- could.
local function to_ready(id, event, ...)
  local group = fields_of(id, 'min_version', 'max_version', 'seq')
  local gate, seq = gate_of(group[1], group[2]), finite(group[3])
  if not (gate and seq) then
    set_aside(id)
    return false
  end
  enter_ready({whole(gate * SEQ_RANGE + seq), id}, {group[3], id})
  redis.call('HSET', group_key(id), 'state', 'ready', 'owner', '')
  audit({id}, event, ...)
  wake_batch()
  return true
end

-- leased -> ready, or quarantine if it was leased so often and never trained. Returns whether ready.
local function return_leased(id, event, ...)
  redis.call('ZREM', LEASED, id)
  local group = fields_of(id, 'leases', 'bytes')
  if finite(group[1], 0) < setting('max_attempts') then
    wake('room') -- with on_full=drop_stalest it may make way
    return to_ready(id, event, ...)
  end
  audit({id}, event, ...)
  to_quarantine(id, 'attempts', group[2])
  return false
end
