-- Which versions survive a rollback, and how they are renumbered. A trainer that restores a checkpoint
-- of version `last` publishes it under a higher number `resume`, because a number is never reused for
-- other weights. Tokens sampled up to `last` survive and keep their distance:
--
--     0 .. last           -> moved up by resume - last
--     last+1 .. resume-1  -> gone: sampled from weights that no longer exist
--     resume ..           -> unchanged
--
-- settings.gaps holds the rollbacks as 'last:resume last:resume', oldest first. num_gaps counts all
-- rollbacks ever; a group's field `gaps` is the number of them applied to its versions.
-- @include lib/group

local MAX_GAPS = 32

local function parse_gaps(text)
  local gaps = {}
  for last, resume in string.gmatch(text or damaged('settings.gaps'), '(%S+):(%S+)') do
    gaps[#gaps + 1] = {last = finite(last), resume = finite(resume)}
    if #gaps > MAX_GAPS or not (finite(last) and finite(resume)) then damaged('settings.gaps') end
  end
  return gaps
end

local function read_gaps()
  local held = redis.call('HMGET', SETTINGS, 'gaps', 'num_gaps')
  return parse_gaps(held[1]), finite(held[2]) or damaged('settings.num_gaps')
end

-- The number of a version after gaps[first] and the later ones; nil if it is gone.
local function renumber(version, gaps, first)
  for i = first, #gaps do
    if version <= gaps[i].last then version = version + gaps[i].resume - gaps[i].last
    elseif version < gaps[i].resume then return nil end
  end
  return version
end

-- The same for 'version:tokens version:tokens': the new text, its oldest and newest version. Versions
-- that become equal stay separate entries, so that entries match the payload's by position.
local function renumber_all(versions, gaps, first)
  local parts, min_version, max_version = {}, nil, nil
  for version, tokens in string.gmatch(versions, '(%d+):(%d+)') do
    local moved = renumber(finite(version, 0), gaps, first)
    if not moved then return nil end
    parts[#parts + 1] = whole(moved) .. ':' .. tokens
    min_version, max_version = min_version or moved, moved
  end
  return table.concat(parts, ' '), min_version, max_version
end

-- Renumbers the versions of a stored group; the caller updates the set that is ordered by them.
-- Returns 'same', 'gone' if it has a token of a version that is gone, 'damaged' if its hash is damaged,
-- or 'moved' and its oldest and newest version.
local function update_numbers(id, gaps, num_gaps)
  local name = group_key(id)
  local group = fields_of(id, 'gaps', 'versions', 'min_version', 'trainable')
  local known = finite(group[1], 0)
  if known == num_gaps then return 'same' end
  local before = group[2] or (group[3] or '') .. ':' .. (group[4] or '')
  if not string.find(before, '^%d+:%d+') then return 'damaged' end
  local first = math.max(1, known - (num_gaps - #gaps) + 1)
  local versions, min_version, max_version = renumber_all(before, gaps, first)
  if not versions then return 'gone' end
  if versions == before then
    redis.call('HSET', name, 'gaps', num_gaps)
    return 'same'
  end
  redis.call('HSET', name, 'gaps', num_gaps, 'versions', versions, 'moved', '1',
    'min_version', whole(min_version), 'max_version', whole(max_version))
  return 'moved', min_version, max_version
end
