"""How K/V and gradients move between ranks: point-to-point messages or copy engines, behind one interface (`base`)."""
