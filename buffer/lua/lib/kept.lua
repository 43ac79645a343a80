-- Tokens of running groups, kept by prompt so that they outlive their group (keep_tokens.lua). A prompt
-- has at most one group at a time, so whoever runs it next finds what the ones before it have sampled.

local KEPT = PREFIX .. 'kept'

-- 'index task' of a prompt as stored in `prompts`; nil if it is damaged.
local function name_of(text) return string.match(text, '^%S+ (%d+ .*)$') end

local function kept_key(name) return KEPT .. ':' .. name end

-- `texts`: prompts as stored, false for none.
local function forget_kept(texts)
  for _, text in ipairs(texts) do
    local name = text and name_of(text)
    if name and redis.call('HDEL', KEPT, name) == 1 then redis.call('UNLINK', kept_key(name)) end
  end
end
