-- Adds {id, {version...}} to `renumbered` for a group that a rollback has renumbered.
local function add_renumbered(renumbered, id, versions)
  local numbers = {}
  for version in string.gmatch(versions or '', '(%d+):%d+') do numbers[#numbers + 1] = version end
  renumbered[#renumbered + 1] = {id, numbers}
end

-- The ids that a lease still holds, the number that it has consumed, and renumbered versions.
local function held_by(lease_token, ids)
  local held, num_consumed, renumbered = {}, 0, {}
  for _, id in ipairs(ids) do
    local group = fields_of(id, 'state', 'lease_token', 'renumbered', 'versions')
    if group[2] == lease_token then
      if group[1] == 'consumed' then num_consumed = num_consumed + 1 end
      if group[1] == 'leased' then
        held[#held + 1] = id
        if group[3] then add_renumbered(renumbered, id, group[4]) end
      end
    end
  end
  return held, num_consumed, renumbered
end
