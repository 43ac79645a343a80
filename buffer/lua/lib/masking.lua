-- The oldest trained version when tokens before `mask_below_version` (nil: none) are masked, and the number
-- of masked tokens.
local function oldest_trained(min_version, versions, trainable, mask_below_version)
  if not mask_below_version or finite(min_version, 0) >= mask_below_version then return finite(min_version, 0), 0 end
  local masked = 0
  for version, tokens in string.gmatch(versions or '', '(%d+):(%d+)') do -- ascending
    if finite(version, 0) >= mask_below_version then return finite(version, 0), masked end
    masked = masked + finite(tokens, 0)
  end
  return mask_below_version, trainable -- all tokens are masked
end
