-- The oldest trained version when tokens before `masked_below` (nil: none) are masked, and the number
-- of masked tokens.
local function oldest_trained(min_version, versions, trainable, masked_below)
  if not masked_below or finite(min_version, 0) >= masked_below then return finite(min_version, 0), 0 end
  local masked = 0
  for version, tokens in string.gmatch(versions or '', '(%d+):(%d+)') do -- ascending
    if finite(version, 0) >= masked_below then return finite(version, 0), masked end
    masked = masked + finite(tokens, 0)
  end
  return masked_below, trainable -- all tokens are masked
end
