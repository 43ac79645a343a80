"""Our losses, corrections and advantages against those of other systems."""
