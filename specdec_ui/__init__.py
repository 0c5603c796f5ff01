"""The Gradio page. Read in this order: `state`, `highlight`, `views`, `handlers`, `layout`."""
