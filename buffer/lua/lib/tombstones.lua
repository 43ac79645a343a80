-- Ends groups: deletes payloads and leaves tombstones.

local function is_tombstone(state)
  return state == 'acked' or state == 'abandoned' or string.sub(state, 1, 8) == 'dropped:'
end

local function leave_tombstones(ids, state)
  local remember_ms = math.ceil(1000 * setting('remember_s'))
  for _, id in ipairs(ids) do
    local name = key('group:' .. id)
    redis.call('HSET', name, 'state', state)
    redis.call('PEXPIRE', name, remember_ms)
  end
end

-- Payloads above 64 MB have further chunks at 'payload:<id>:1' and on.
local function payload_keys(id, num_chunks)
  local names = {key('payload:' .. id)}
  for i = 1, math.min(finite(num_chunks, 0), MAX_ITEMS) do names[i + 1] = names[1] .. ':' .. i end
  return names
end

local function unlink(names)
  for first = 1, #names, MAX_ITEMS do
    redis.call('UNLINK', unpack(names, first, math.min(first + MAX_ITEMS - 1, #names)))
  end
end

-- Turns groups that are in no set into tombstones. Returns their bytes, and the tokens, trainable
-- tokens and prompt of each.
local function to_tombstones(ids, state)
  local prompts, keys_to_unlink, total_bytes, total_tokens = {}, {}, 0, 0
  for i, id in ipairs(ids) do
    local group = fields_of(id, 'bytes', 'tokens', 'chunks', 'task', 'index', 'attempt', 'trainable')
    local tokens = finite(group[2], 0)
    total_bytes, total_tokens = total_bytes + finite(group[1], 0), total_tokens + tokens
    keys_to_unlink[#keys_to_unlink + 1] = group_key(id)
    for _, payload in ipairs(payload_keys(id, group[3])) do
      keys_to_unlink[#keys_to_unlink + 1] = payload
    end
    prompts[i] = {tokens = tokens, trainable = finite(group[7], 0), task = group[4],
      index = group[5], attempt = finite(group[6], 0), reruns = 0}
  end
  unlink(keys_to_unlink)
  leave_tombstones(ids, state)
  count('bytes', -total_bytes)
  count('tokens', -total_tokens)
  return total_bytes, prompts
end
