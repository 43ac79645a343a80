-- Oldest version that is trained when tokens before `masked_below` (nil: none) are masked, and how
-- many those are.
local function oldest_trained(min_version, versions, trainable, masked_below)
  if not masked_below or finite(min_version, 0) >= masked_below then return finite(min_version, 0), 0 end
  local masked = 0
  for version, tokens in string.gmatch(versions or '', '(%d+):(%d+)') do -- ascending
    if finite(version, 0) >= masked_below then return finite(version, 0), masked end
    masked = masked + finite(tokens, 0)
  end
  return masked_below, trainable -- nothing is left of it
end
