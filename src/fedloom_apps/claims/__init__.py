"""An open register of published claims: what is open, what runs would decide it, and what given runs say."""
