-- Which versions survive a rollback, and how they are renumbered. A trainer that restores a checkpoint
-- of version `last` publishes it under a higher number `resume`, because a number is never reused for
-- other weights. Tokens sampled up to `last` survive and keep their distance:
--
--     0 .. last           -> moved up by resume - last
--     last+1 .. resume-1  -> gone: sampled from weights that no longer exist
--     resume ..           -> unchanged
--
-- settings.rollbacks holds the rollbacks as 'last:resume last:resume', oldest first. num_rollbacks counts all
-- rollbacks ever; a group's field `rollbacks` is the number of them applied to its versions.

local MAX_ROLLBACKS = 32

local function parse_rollbacks(text)
  local rollbacks = {}
  for last, resume in string.gmatch(text or damaged('settings.rollbacks'), '(%S+):(%S+)') do
    rollbacks[#rollbacks + 1] = {last = finite(last), resume = finite(resume)}
    if #rollbacks > MAX_ROLLBACKS or not (finite(last) and finite(resume)) then damaged('settings.rollbacks') end
  end
  return rollbacks
end

local function read_rollbacks()
  local held = redis.call('HMGET', SETTINGS, 'rollbacks', 'num_rollbacks')
  return parse_rollbacks(held[1]), finite(held[2]) or damaged('settings.num_rollbacks')
end

-- The number of a version after rollbacks[first] and the later ones; nil if it is gone.
local function renumber(version, rollbacks, first)
  for i = first, #rollbacks do
    if version <= rollbacks[i].last then version = version + rollbacks[i].resume - rollbacks[i].last
    elseif version < rollbacks[i].resume then return nil end
  end
  return version
end

-- The same for 'version:tokens version:tokens': the new text, its oldest and newest version. Versions
-- that become equal stay separate entries, so that entries match the payload's by position.
local function renumber_all(versions, rollbacks, first)
  local parts, min_version, max_version = {}, nil, nil
  for version, tokens in string.gmatch(versions, '(%d+):(%d+)') do
    local moved = renumber(finite(version, 0), rollbacks, first)
    if not moved then return nil end
    parts[#parts + 1] = whole(moved) .. ':' .. tokens
    min_version, max_version = min_version or moved, moved
  end
  return table.concat(parts, ' '), min_version, max_version
end

-- Renumbers the versions of a stored group; the caller updates the set that is ordered by them.
-- Returns 'same', 'gone' if it has a token of a version that is gone, 'damaged' if its hash is damaged,
-- or 'moved' and its oldest and newest version.
local function update_numbers(id, rollbacks, num_rollbacks)
  local name = group_key(id)
  local group = fields_of(id, 'rollbacks', 'versions', 'min_version', 'trainable')
  local known = finite(group[1], 0)
  if known == num_rollbacks then return 'same' end
  local before = group[2] or (group[3] or '') .. ':' .. (group[4] or '')
  if not string.find(before, '^%d+:%d+') then return 'damaged' end
  local first = math.max(1, known - (num_rollbacks - #rollbacks) + 1)
  local versions, min_version, max_version = renumber_all(before, rollbacks, first)
  if not versions then return 'gone' end
  if versions == before then
    redis.call('HSET', name, 'rollbacks', num_rollbacks)
    return 'same'
  end
  redis.call('HSET', name, 'rollbacks', num_rollbacks, 'versions', versions, 'renumbered', '1',
    'min_version', whole(min_version), 'max_version', whole(max_version))
  return 'moved', min_version, max_version
end
