-- ready -> leased

local sets_of_groups = {ready = READY, leased = LEASED, consumed = key('consumed'),
  quarantined = QUARANTINED}

-- The fields that `take` needs. Removes groups with a damaged hash from `ready`.
-- Returns the ids of the others, and their fields by id.
local function whole_groups(ids)
  local found, fields = {}, {}
  for _, id in ipairs(ids) do
    local group = fields_of(id, 'tokens', 'leases', 'renumbered', 'versions', 'state', 'min_version', 'bytes',
      'trainable', 'seq', 'pairs')
    if group[5] == 'ready' and finite(group[1]) and finite(group[6]) and finite(group[7])
        and finite(group[8]) and finite(group[9]) then
      found[#found + 1], fields[id] = id, group
    else
      leave_ready({id})
      -- If another set holds it, only its entry in `ready` was wrong.
      local set = group[5] and sets_of_groups[group[5]]
      if not (set and redis.call('ZSCORE', set, id)) then set_aside(id) end
    end
  end
  return found, fields
end

-- What a group costs in passes, in tokens.
local function cost_of(tokens, num_pairs, pair_cost)
  return whole(finite(tokens, 0) + pair_cost * finite(num_pairs, 0))
end

-- ready -> leased, of whole groups, as `lease` asks. Returns the cost of each, and the versions of
-- those that were renumbered.
local function take(ids, fields, lease_token, deadline, lease)
  local costs, renumbered, deadlines = {}, {}, {}
  leave_ready(ids)
  for i, id in ipairs(ids) do
    local group = fields[id]
    redis.call('HSET', group_key(id), 'state', 'leased', 'lease_token', lease_token,
      'leases', finite(group[2], 0) + 1)
    costs[i] = cost_of(group[1], group[10], lease.pair_cost)
    if group[3] then add_renumbered(renumbered, id, group[4]) end
    deadlines[2 * i - 1], deadlines[2 * i] = deadline, id
  end
  call_many('ZADD', LEASED, deadlines)
  audit(ids, 'leased', 's', lease.step, 'o', lease_token)
  return costs, renumbered
end

-- The trainer masks tokens older than this version; false if it masks none.
local function mask_below(version)
  return on_stale == 'mask_tokens' and oldest_fresh(version)
end
