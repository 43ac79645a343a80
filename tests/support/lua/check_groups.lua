-- Whether the parts of what is kept of some groups agree with each other, at this moment.
-- Request: group_ids.
-- Reply: {{id, what is wrong, id, what is wrong...}, bytes, bytes consumed, bytes in quarantine, tokens}
local wrong, bytes, tokens = {}, {ready = 0, leased = 0, consumed = 0, quarantined = 0}, 0

local function check(id)
  local function say(text)
    wrong[#wrong + 1] = id
    wrong[#wrong + 1] = text
  end
  local group = redis.pcall('HMGET', group_key(id), 'state', 'lease_token', 'seq', 'min_version',
    'max_version', 'bytes', 'tokens', 'chunks', 'trainable')
  if group.err then return say('its hash is none: ' .. group.err) end
  local state, is_living = group[1], false
  for name in pairs(bytes) do
    local score = redis.call('ZSCORE', key(name), id)
    if name == state then
      is_living = true
      if not score then say('its state is ' .. name .. ' but it is not in that set') end
    elseif score then
      say('it is in the set ' .. name .. ' but its state is ' .. (state or 'unknown'))
    end
  end
  if not state and redis.call('EXISTS', group_key(id)) == 1 then say('its hash has no state') end
  local is_tombstone = state and is_tombstone(state)
  if state and not is_living and not is_tombstone then say('its state ' .. state .. ' does not exist') end

  local is_running, has_credit = redis.call('ZSCORE', RUNNING, id), redis.call('ZSCORE', CREDITS, id)
  if is_running and not has_credit then say('it is running without a deadline in credits') end
  if has_credit and not is_running then say('it has a deadline in credits but is not running') end

  if not is_running and redis.call('HEXISTS', PROMPTS, id) == 1 then
    say('its prompt is noted but it is not running')
  end
  if is_running and state == 'abandoned' then say('it is running but was given up') end

  local place = redis.call('ZSCORE', ORDER, id)
  if place and not (has_order and state == 'ready') then say('it is in order but not ready') end
  for i, name in ipairs(payload_keys(id, group[8])) do
    local expiry = redis.call('PTTL', name) -- -2: no such key, -1: stays
    if is_living and expiry == -2 then say('its payload is missing: ' .. name) end
    if is_living and expiry >= 0 then say('its payload expires: ' .. name) end
    if not is_living and expiry == -1 then say('orphan: ' .. name .. ' belongs to no group and stays') end
  end
  if is_living and not (finite(group[3]) and finite(group[4]) and finite(group[6]) and finite(group[7])) then
    return say('its hash lacks fields that every group has')
  end
  if is_living then
    if redis.call('PTTL', group_key(id)) ~= -1 then say('its hash expires') end
    if (state == 'leased') ~= ((group[2] or '') ~= '') and state ~= 'consumed' then
      say('its lease_token does not go with its state ' .. state)
    end
    bytes[state] = bytes[state] + group[6]
    tokens = tokens + group[7]
  end
  if state == 'ready' then
    local score = whole((gate_of(group[4], group[5]) or 0) * SEQ_RANGE + group[3])
    local held = redis.call('ZSCORE', READY, id)
    if held and whole(tonumber(held)) ~= score then say('its score in ready is not that of its versions') end
    if has_order and not (place and whole(place) == order_of(group[3], group[9])) then
      say('its place in order is wrong')
    end
  end
  if is_tombstone and (redis.call('PTTL', group_key(id)) < 0 or redis.call('HLEN', group_key(id)) > 1) then
    say('its tombstone is more than a state that expires')
  end
end

for _, id in ipairs(request.group_ids) do check(id) end
local held = bytes.ready + bytes.leased + bytes.consumed + bytes.quarantined
return {wrong, held, bytes.consumed, bytes.quarantined, tokens}
