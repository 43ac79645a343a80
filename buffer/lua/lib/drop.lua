local function length_of(tokens)
  return tokens <= 1024 and '<=1k' or tokens <= 4096 and '<=4k' or tokens <= 16384 and '<=16k'
    or tokens <= 65536 and '<=64k' or '>64k'
end

-- Counts dropped groups. The prompts of stale or rolled back groups run again, those of evicted do not.
local function count_drops(ids, reason, prompts)
  local tokens, trainable = 0, 0
  for _, prompt in ipairs(prompts) do
    tokens, trainable = tokens + prompt.tokens, trainable + prompt.trainable
    count('dropped_len:' .. length_of(prompt.tokens), 1)
    if reason == 'stale' then requeue_stale(prompt)
    elseif reason == 'lineage' then requeue(prompt) end
  end
  count('dropped:' .. reason, #prompts)
  count('dropped_tokens:' .. reason, tokens)
  count('tokens_dropped', trainable)
  wake('room')
  audit(ids, 'dropped', 'r', reason)
end

local function drop(ids, reason)
  if #ids == 0 then return end
  local _, prompts = to_tombstones(ids, 'dropped:' .. reason)
  count_drops(ids, reason, prompts)
end
