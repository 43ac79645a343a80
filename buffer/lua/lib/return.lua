-- Returns groups to ready.

-- Moves a group that is in no set to ready; `event` says why. False if its hash is damaged.
local function to_ready(id, event, ...)
  local group = fields_of(id, 'min_version', 'max_version', 'seq', 'trainable')
  local gate, seq, trainable = gate_of(group[1], group[2]), finite(group[3]), finite(group[4])
  if not (gate and seq and trainable) then
    set_aside(id)
    return false
  end
  enter_ready({whole(gate * SEQ_RANGE + seq), id}, {order_of(seq, trainable), id})
  redis.call('HSET', group_key(id), 'state', 'ready', 'lease_token', '')
  audit({id}, event, ...)
  wake_batch()
  return true
end

-- leased -> ready, or quarantined after too many leases without training. Returns whether it is ready.
local function return_leased(id, event, ...)
  redis.call('ZREM', LEASED, id)
  local group = fields_of(id, 'leases', 'bytes')
  if finite(group[1], 0) < setting('max_attempts') then
    wake('room') -- with on_full=drop_stalest it can be evicted
    return to_ready(id, event, ...)
  end
  audit({id}, event, ...)
  to_quarantine(id, 'attempts', group[2])
  return false
end
