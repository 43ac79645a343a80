-- @include lib/group

-- The ids that a lease still holds, the number that it has consumed, and renumbered versions.
local function held_by(lease_token, ids)
  local held, num_consumed, moved = {}, 0, {}
  for _, id in ipairs(ids) do
    local group = fields_of(id, 'state', 'owner', 'moved', 'versions')
    if group[2] == lease_token then
      if group[1] == 'consumed' then num_consumed = num_consumed + 1 end
      if group[1] == 'leased' then
        held[#held + 1] = id
        if group[3] then
          moved[#moved + 1] = id
          moved[#moved + 1] = group[4] or ''
        end
      end
    end
  end
  return held, num_consumed, moved
end

-- The deadline of a lease, for a repeated call.
local function deadline_of(id) return whole(finite(redis.call('ZSCORE', LEASED, id), now_ms())) end
